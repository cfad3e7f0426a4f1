"""What a fit is used for: expectations, evidence, weights of modes."""
