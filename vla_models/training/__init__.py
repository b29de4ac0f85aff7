"""Training stages of the demo policy; the composition root is `vla_cli.train_main`."""
