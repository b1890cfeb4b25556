"""What ``train_gpt.py`` trains, and on what: the model and its text."""
