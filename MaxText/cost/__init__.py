"""Compiling the train step ahead of time, for devices that need not be there."""
