# find_package(exportkit) defines the targets exportkit::runtime (exportkit/runtime.h, C++ with torch's classes) and
# exportkit::c (exportkit/exportkit.h, C without torch's headers). CMAKE_PREFIX_PATH must contain the folder of the
# installed Python package: $(python -c "import exportkit; print(exportkit.__path__[0])"). EXPORTKIT_TORCH is torch's
# folder; the default is the torch beside exportkit, or else Python3's torch.
get_filename_component(_exportkit_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT EXPORTKIT_TORCH AND EXISTS "${_exportkit_prefix}/../torch/lib/libtorch.so")
  get_filename_component(EXPORTKIT_TORCH "${_exportkit_prefix}/../torch" ABSOLUTE)
endif()
include("${CMAKE_CURRENT_LIST_DIR}/torch.cmake")

set(_exportkit_reader "${_exportkit_prefix}/lib/libexportkit_package.so")  # the package reader, which the runtime needs
set(_exportkit_library "${_exportkit_prefix}/lib/torch${EXPORTKIT_TORCH_VERSION}/libexportkit_runtime.so")
if(NOT EXISTS "${_exportkit_library}")
  set(exportkit_FOUND FALSE)
  set(exportkit_NOT_FOUND_MESSAGE
      "The C++ runtime was not built for torch ${EXPORTKIT_TORCH_VERSION} (there is no ${_exportkit_library}): run "
      "`make build` where that torch is installed.")
  return()
endif()
if(NOT TARGET exportkit::runtime)
  add_library(exportkit::runtime SHARED IMPORTED)
  set_target_properties(exportkit::runtime PROPERTIES
    IMPORTED_LOCATION "${_exportkit_library}"
    INTERFACE_INCLUDE_DIRECTORIES "${_exportkit_prefix}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20  # torch's headers need it
    IMPORTED_LINK_DEPENDENT_LIBRARIES "${_exportkit_reader}"
    INTERFACE_LINK_LIBRARIES exportkit_torch)
endif()
if(NOT TARGET exportkit::c)
  add_library(exportkit::c SHARED IMPORTED)
  set_target_properties(exportkit::c PROPERTIES
    IMPORTED_LOCATION "${_exportkit_library}"
    INTERFACE_INCLUDE_DIRECTORIES "${_exportkit_prefix}/include"
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")  # the library finds torch where it is installed
endif()
