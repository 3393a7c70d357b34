"""From gradients to new weights: param groups, one chunk's update, and the queue that carries updates out."""
