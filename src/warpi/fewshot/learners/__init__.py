"""Few-shot learners, one module per algorithm, and what they share."""
