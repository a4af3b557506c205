"""The papers' models, declared in PyMC with the public interface of fedppl only."""
