"""Settings chosen by validation data of the clients: sums of validation losses travel, rows never do."""

from fedppl.search.validation import ValidationLoss, holdout, validation_loss

__all__ = ["ValidationLoss", "holdout", "validation_loss"]
