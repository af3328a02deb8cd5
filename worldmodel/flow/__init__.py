"""Data that is fetched, filtered, captioned and encoded by stages while a model trains on it."""
