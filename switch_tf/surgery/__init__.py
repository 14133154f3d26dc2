"""Models made from models."""
