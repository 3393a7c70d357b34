"""The user's parameters, and the chunks behind them."""
