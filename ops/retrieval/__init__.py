"""Scores for retrieval: maxima over the tokens of a document, late interaction and sparse representations."""
