"""A daemon that answers each frame with its body."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.frame import Frame, frame_prefix

HEADER = b'{"code":10}'


def frame(body: bytes) -> bytes:
    return frame_prefix(0, len(HEADER), len(body)) + HEADER + body


@dataclass
class Echo:
    """Answers each frame with its own body; b"big:N" with N bytes."""

    closed_channels: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    handled: int = 0

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        self.handled += len(frames)
        for _, _, body in frames:
            text = bytes(body)
            answer = b"x" * int(text[4:]) if text.startswith(b"big:") else text
            channel.write(frame_prefix(0, 2, len(answer)) + b"{}", answer)
        return []

    def finish_turn(self) -> None:
        self.batches.append(self.handled)

    def replied(self) -> None:
        pass

    def closed(self, channel: ServerChannel) -> None:
        self.closed_channels.append(channel.address)
