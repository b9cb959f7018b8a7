"""Passes of a network and their derivatives: Jacobian products, traced graphs, replayed random numbers."""
