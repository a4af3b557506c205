"""Settings chosen by validation data of the clients: sums of validation losses travel, rows never do."""
