"""Vision adapters and the encoders behind them."""
