"""Predicting a table of published training runs and scoring the predictions."""
