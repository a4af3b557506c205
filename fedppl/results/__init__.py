"""What a fit returns, and what can be asked of it."""
