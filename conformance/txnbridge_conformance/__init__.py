"""The conformance suite: tests of a backend's guarantees, and runs that attack a broker and judge its history."""
