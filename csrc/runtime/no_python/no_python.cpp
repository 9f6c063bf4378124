// Stands in for libtorch_python.so in a program without Python. An operator library that torch's CppExtension or
// pybind11 made a Python module, too, names Python's types and exceptions and torch's classes, which only functions
// that Python calls use. The dynamic linker asks for functions when they are called, but for these, and for the two
// functions that stand in a table, when it loads the library. Python that is loaded later would find them in place of
// its own.
// clang-format off
#define NAMES(X) \
  X(PyBaseObject_Type) X(PyBool_Type) X(PyByteArray_Type) X(PyBytes_Type) X(PyCFunction_Type) X(PyCMethod_Type)   \
  X(PyCapsule_Type) X(PyCell_Type) X(PyClassMethodDescr_Type) X(PyClassMethod_Type) X(PyCode_Type)                \
  X(PyComplex_Type) X(PyCoro_Type) X(PyDict_Type) X(PyEllipsis_Type) X(PyExc_ArithmeticError)                     \
  X(PyExc_AssertionError) X(PyExc_AttributeError) X(PyExc_BaseException) X(PyExc_BlockingIOError)                 \
  X(PyExc_BrokenPipeError) X(PyExc_BufferError) X(PyExc_BytesWarning) X(PyExc_ChildProcessError)                  \
  X(PyExc_ConnectionAbortedError) X(PyExc_ConnectionError) X(PyExc_ConnectionRefusedError)                        \
  X(PyExc_ConnectionResetError) X(PyExc_DeprecationWarning) X(PyExc_EOFError) X(PyExc_EncodingWarning)            \
  X(PyExc_EnvironmentError) X(PyExc_Exception) X(PyExc_FileExistsError) X(PyExc_FileNotFoundError)                \
  X(PyExc_FloatingPointError) X(PyExc_FutureWarning) X(PyExc_GeneratorExit) X(PyExc_IOError) X(PyExc_ImportError) \
  X(PyExc_ImportWarning) X(PyExc_IndentationError) X(PyExc_IndexError) X(PyExc_InterruptedError)                  \
  X(PyExc_IsADirectoryError) X(PyExc_KeyError) X(PyExc_KeyboardInterrupt) X(PyExc_LookupError)                    \
  X(PyExc_MemoryError) X(PyExc_ModuleNotFoundError) X(PyExc_NameError) X(PyExc_NotADirectoryError)                \
  X(PyExc_NotImplementedError) X(PyExc_OSError) X(PyExc_OverflowError) X(PyExc_PendingDeprecationWarning)         \
  X(PyExc_PermissionError) X(PyExc_ProcessLookupError) X(PyExc_RecursionError) X(PyExc_ReferenceError)            \
  X(PyExc_ResourceWarning) X(PyExc_RuntimeError) X(PyExc_RuntimeWarning) X(PyExc_StopAsyncIteration)              \
  X(PyExc_StopIteration) X(PyExc_SyntaxError) X(PyExc_SyntaxWarning) X(PyExc_SystemError) X(PyExc_SystemExit)     \
  X(PyExc_TabError) X(PyExc_TimeoutError) X(PyExc_TypeError) X(PyExc_UnboundLocalError)                           \
  X(PyExc_UnicodeDecodeError) X(PyExc_UnicodeEncodeError) X(PyExc_UnicodeError) X(PyExc_UnicodeTranslateError)    \
  X(PyExc_UnicodeWarning) X(PyExc_UserWarning) X(PyExc_ValueError) X(PyExc_Warning) X(PyExc_ZeroDivisionError)    \
  X(PyFloat_Type) X(PyFrame_Type) X(PyFrozenSet_Type) X(PyFunction_Type) X(PyGen_Type) X(PyGetSetDescr_Type)      \
  X(PyInstanceMethod_Type) X(PyList_Type) X(PyLong_Type) X(PyMemberDescr_Type) X(PyMemoryView_Type)               \
  X(PyMethodDescr_Type) X(PyMethod_Type) X(PyModuleDef_Type) X(PyModule_Type) X(PyObject_GenericGetDict)          \
  X(PyObject_GenericSetDict) X(PyProperty_Type) X(PyRange_Type) X(PySet_Type) X(PySlice_Type)                     \
  X(PyStaticMethod_Type) X(PySuper_Type) X(PyTraceBack_Type) X(PyTuple_Type) X(PyType_Type) X(PyUnicode_Type)     \
  X(PyWrapperDescr_Type) X(THPDeviceType) X(THPDtypeType) X(THPEventClass) X(THPEventType) X(THPFInfoType)        \
  X(THPFunctionClass) X(THPFunctionType) X(THPGeneratorClass) X(THPGradientEdgeClass) X(THPIInfoType)             \
  X(THPLayoutType) X(THPMemoryFormatType) X(THPQSchemeType) X(THPSizeType) X(THPStorageClass) X(THPStorageType)   \
  X(THPStreamClass) X(THPVariableClass) X(_Py_FalseStruct) X(_Py_NoneStruct) X(_Py_NotImplementedStruct)          \
  X(_Py_TrueStruct) X(_Py_EllipsisObject) X(_PyByteArray_empty_string) X(_PyWeakref_CallableProxyType)            \
  X(_PyWeakref_ProxyType) X(_PyWeakref_RefType) X(PyAsyncGen_Type) X(PyContextVar_Type) X(PyDictProxy_Type)       \
  X(PyODict_Type) X(Py_GenericAliasType)

#define X(name) __attribute__((visibility("default"))) void* name;
extern "C" {
NAMES(X)
}
