"""What fits where: memory estimates."""
