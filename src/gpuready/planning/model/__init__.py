"""What a model is, read from config.json and the headers of its weights: layers, weights, what a token keeps."""
