"""The parts of ``train_gpt.py``: model, text, options, and a trainer for each mode."""
