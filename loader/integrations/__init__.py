"""Integrations: doors into serving frameworks; none imports its framework until it is asked."""
