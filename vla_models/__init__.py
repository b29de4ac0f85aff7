"""Models in torch: ViT, LLaMA, the robot backbone made of both, the flow-matching head, loaders, training, export."""
