"""Pure decisions: no clock, no randomness, no I/O; all of it comes in as arguments."""
