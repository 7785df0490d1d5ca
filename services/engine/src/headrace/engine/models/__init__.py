"""Model weights from disk, and the forward pass over one step's ragged batch."""
