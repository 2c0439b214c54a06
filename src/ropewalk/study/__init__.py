"""The study: models that differ only in their encoding, trained, and evaluated beyond the training length."""
