"""Semi-implicit families, their hierarchies, and the samplers that a fit is."""
