package headrace.conformance;

/** One thing the official client does to a broker; returns what it saw, throws when it differs. */
@FunctionalInterface
interface Scenario {
    String run(Session session) throws Exception;
}
