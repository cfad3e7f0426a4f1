"""Coordinates u in which a target is nearly N(0, I), by affine maps, warps and tails; integrals along lines."""
