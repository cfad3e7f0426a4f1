"""KSIVI, HKSIVI and what trained approximators share."""
