"""The parts of a forward pass that know nothing of where weights or cached keys live."""
