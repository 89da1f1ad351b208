"""Model definitions, written once against `polysilicon.ops`, and how checkpoints become them."""
