"""What passes ask of a program: names, element types, constants, where values go."""
