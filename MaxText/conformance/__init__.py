"""Checks that every part of a model has to pass, built-in or a user's."""
