"""Training data: texts to packed token files, without a GPU framework; and the bundled text."""
