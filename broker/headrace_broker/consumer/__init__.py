"""Who consumes, what and how far: members of groups, their settings, progress and queue locks."""
