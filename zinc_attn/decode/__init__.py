"""Attention calls: one-shot and on the resident cache."""
