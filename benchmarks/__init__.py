"""The measured claims: one script a claim, results appended to CSV files in results/."""
