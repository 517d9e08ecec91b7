"""Graph rewrites for recommender models, run before torch.compile."""
