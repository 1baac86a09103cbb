"""Generators as policies. Library objects are wrapped; none of their code is copied."""
