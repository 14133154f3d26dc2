"""What a trained model says: predictions, token by token, and how probable given targets are to it."""
