"""What the user says: model, training, cluster, experiment; loaded strictly."""
