"""Which replica runs a request, and why."""
