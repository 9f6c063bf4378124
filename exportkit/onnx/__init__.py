"""ONNX models: the files, and the conversion of a traced model whose custom operators become functions."""
