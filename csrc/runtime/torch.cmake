# Defines the target exportkit_torch, the libtorch of an installed torch wheel. EXPORTKIT_TORCH is the folder of the
# Python package; the default is the torch of the Python3 that CMake finds. Sets EXPORTKIT_TORCH_VERSION to
# <major>.<minor>.
#
# find_package(Torch) would require a CUDA toolkit if torch has CUDA, but nothing here needs one.
if(NOT EXPORTKIT_TORCH)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import torch; print(torch.__path__[0])"
    OUTPUT_VARIABLE _exportkit_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(EXPORTKIT_TORCH "${_exportkit_torch}" CACHE PATH "The folder of the installed torch package")
endif()
set(_exportkit_version "${EXPORTKIT_TORCH}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_exportkit_version}")
  message(FATAL_ERROR "There is no torch in EXPORTKIT_TORCH ('${EXPORTKIT_TORCH}'): pip install torch, and give its folder "
                      "with -DEXPORTKIT_TORCH=$(python -c 'import torch; print(torch.__path__[0])')")
endif()
file(STRINGS "${_exportkit_version}" _exportkit_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" EXPORTKIT_TORCH_VERSION "${_exportkit_lines}")

if(NOT TARGET exportkit_torch)
  add_library(exportkit_torch INTERFACE IMPORTED)
  set_target_properties(exportkit_torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${EXPORTKIT_TORCH}/include;${EXPORTKIT_TORCH}/include/torch/csrc/api/include"
    # libtorch.so loads torch's CUDA part, if it exists, although nothing refers to it. The build machine does not need
    # that part's libraries.
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined"
    INTERFACE_LINK_LIBRARIES
      "-Wl,--push-state,--no-as-needed;${EXPORTKIT_TORCH}/lib/libtorch.so;${EXPORTKIT_TORCH}/lib/libtorch_cpu.so;${EXPORTKIT_TORCH}/lib/libc10.so;-Wl,--pop-state")
endif()
