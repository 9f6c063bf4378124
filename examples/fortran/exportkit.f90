! The part of exportkit.h that a program with arrays of real(c_float) needs.
!
! Elements that differ in the first index lie next to each other in Fortran; in C, it is the last index. So an array
! a(8, 32, 3, batch) is the tensor [batch, 3, 32, 8] in the same memory: sizes are reversed, and nothing is copied.
module exportkit
  use, intrinsic :: iso_c_binding
  implicit none
  private
  public :: model, tensor, view, open_model, input_name, view_of, run, read_case, replay, release, close_model

  integer, parameter :: cpu = 1  ! kDLCPU
  integer(c_int8_t), parameter :: float_code = 2  ! kDLFloat
  integer(c_int64_t), parameter :: contiguous_outputs = 2

  type, bind(c) :: dl_device
    integer(c_int32_t) :: device_type, device_id
  end type

  type, bind(c) :: dl_dtype
    integer(c_int8_t) :: code, bits
    integer(c_int16_t) :: lanes
  end type

  type, bind(c) :: dl_tensor
    type(c_ptr) :: data
    type(dl_device) :: device
    integer(c_int32_t) :: ndim
    type(dl_dtype) :: dtype
    type(c_ptr) :: shape, strides
    integer(c_int64_t) :: byte_offset
  end type

  type, bind(c) :: dl_managed_tensor_versioned
    integer(c_int32_t) :: major, minor
    type(c_ptr) :: manager_ctx
    type(c_funptr) :: deleter
    integer(c_int64_t) :: flags
    type(dl_tensor) :: contents
  end type

  type, bind(c) :: run_options
    integer(c_size_t) :: size
    integer(c_int64_t) :: flags
    type(c_ptr) :: stream
  end type

  type, bind(c) :: tensor_info
    type(c_ptr) :: name, dtype
    type(dl_dtype) :: element
    integer(c_int32_t) :: ndim
    type(c_ptr) :: shape
  end type

  type, bind(c) :: description
    type(c_ptr) :: name, version, target, device
    type(dl_device) :: where
    integer(c_size_t) :: input_count
    type(c_ptr) :: inputs
    integer(c_size_t) :: output_count
    type(c_ptr) :: outputs
    integer(c_size_t) :: dimension_count
    type(c_ptr) :: dimensions
    integer(c_size_t) :: case_count
    type(c_ptr) :: cases
  end type

  ! An open model.
  type :: model
    integer(c_int64_t) :: handle = 0
    integer :: input_count = 0, output_count = 0, case_count = 0
    character(:), allocatable :: name, device
  end type

  ! An array of the program, as an input. The array and this view must exist until the call returns.
  type :: view
    type(dl_tensor) :: contents
    integer(c_int64_t), allocatable :: sizes(:)
  end type

  ! A tensor that the library made. `release` frees it.
  type :: tensor
    type(c_ptr) :: managed = c_null_ptr
  contains
    procedure :: sizes => sizes_of_tensor
    procedure :: values => values_of_tensor
  end type

  interface
    function exportkit_open(path, options, handle, error) bind(c) result(code)
      import
      character(kind=c_char), intent(in) :: path(*)
      type(c_ptr), value :: options
      integer(c_int64_t), intent(out) :: handle
      type(c_ptr), intent(out) :: error
      integer(c_int) :: code
    end function

    function exportkit_describe(handle, about, error) bind(c) result(code)
      import
      integer(c_int64_t), value :: handle
      type(c_ptr), intent(out) :: about, error
      integer(c_int) :: code
    end function

    function exportkit_run(handle, inputs, input_count, outputs, output_count, options, error) bind(c) result(code)
      import
      integer(c_int64_t), value :: handle
      type(c_ptr), intent(in) :: inputs(*)
      integer(c_size_t), value :: input_count, output_count
      type(c_ptr), intent(out) :: outputs(*)
      type(run_options), intent(in) :: options
      type(c_ptr), intent(out) :: error
      integer(c_int) :: code
    end function

    function exportkit_read_case(handle, index, inputs, input_count, outputs, output_count, error) bind(c) result(code)
      import
      integer(c_int64_t), value :: handle
      integer(c_size_t), value :: index, input_count, output_count
      type(c_ptr), intent(out) :: inputs(*), outputs(*), error
      integer(c_int) :: code
    end function

    function exportkit_replay(handle, index, error) bind(c) result(code)
      import
      integer(c_int64_t), value :: handle
      integer(c_size_t), value :: index
      type(c_ptr), intent(out) :: error
      integer(c_int) :: code
    end function

    function exportkit_close(handle, error) bind(c) result(code)
      import
      integer(c_int64_t), value :: handle
      type(c_ptr), intent(out) :: error
      integer(c_int) :: code
    end function

    function exportkit_error_message(error) bind(c) result(text)
      import
      type(c_ptr), value :: error
      type(c_ptr) :: text
    end function

    subroutine exportkit_error_free(error) bind(c)
      import
      type(c_ptr), value :: error
    end subroutine

    subroutine delete_tensor(managed) bind(c)
      import
      type(c_ptr), value :: managed
    end subroutine

    function strlen(text) bind(c) result(length)
      import
      type(c_ptr), value :: text
      integer(c_size_t) :: length
    end function
  end interface

contains

  ! Opens a package. On failure, `problem` is allocated and says why; so it is for the others.
  subroutine open_model(path, opened, problem)
    character(*), intent(in) :: path
    type(model), intent(out) :: opened
    character(:), allocatable, intent(out) :: problem
    type(description), pointer :: about
    type(c_ptr) :: error, described
    if (failed(exportkit_open(path // c_null_char, c_null_ptr, opened%handle, error), error, problem)) return
    if (failed(exportkit_describe(opened%handle, described, error), error, problem)) return
    call c_f_pointer(described, about)
    opened%name = text(about%name)
    opened%device = text(about%device)
    opened%input_count = int(about%input_count)
    opened%output_count = int(about%output_count)
    opened%case_count = int(about%case_count)
  end subroutine

  ! The name and dtype of an input, counted from 1.
  function input_name(opened, index) result(name)
    type(model), intent(in) :: opened
    integer, intent(in) :: index
    character(:), allocatable :: name
    type(description), pointer :: about
    type(tensor_info), pointer :: info
    type(c_ptr), pointer :: infos(:)
    type(c_ptr) :: error, described
    integer(c_int) :: code
    code = exportkit_describe(opened%handle, described, error)
    if (code /= 0) error stop "the model is closed"
    call c_f_pointer(described, about)
    call c_f_pointer(about%inputs, infos, [about%input_count])
    call c_f_pointer(infos(index), info)
    name = text(info%name) // " " // text(info%dtype)
  end function

  ! A view of an array of any rank: view_of(a, shape(a)). The array needs the attribute `target`, and its elements must
  ! lie next to each other: a section with gaps would be copied, and the copy is gone after this call.
  function view_of(array, sizes) result(made)
    real(c_float), intent(in), target :: array(*)
    integer, intent(in) :: sizes(:)
    type(view) :: made
    integer(c_int8_t), parameter :: bits = storage_size(0.0_c_float)
    allocate (made%sizes, source=int(sizes(size(sizes):1:-1), c_int64_t))
    made%contents = dl_tensor(c_loc(array), dl_device(cpu, 0), size(sizes), dl_dtype(float_code, bits, 1_c_int16_t), &
                              c_null_ptr, c_null_ptr, 0_c_int64_t)
  end function

  ! Runs the model.
  subroutine run(opened, inputs, outputs, problem)
    type(model), intent(in) :: opened
    type(view), intent(inout), target :: inputs(:)
    type(tensor), allocatable, intent(out) :: outputs(:)
    character(:), allocatable, intent(out) :: problem
    type(c_ptr) :: given(size(inputs)), made(opened%output_count), error
    type(run_options) :: options
    integer :: i
    do i = 1, size(inputs)
      inputs(i)%contents%shape = c_loc(inputs(i)%sizes)
      given(i) = c_loc(inputs(i)%contents)
    end do
    options = run_options(c_sizeof(options), contiguous_outputs, c_null_ptr)
    if (failed(exportkit_run(opened%handle, given, size(given, kind=c_size_t), made, size(made, kind=c_size_t), &
                             options, error), error, problem)) return
    outputs = [(tensor(made(i)), i=1, size(made))]
  end subroutine

  ! Reads a recorded case, counted from 1: the inputs, and the outputs at export.
  subroutine read_case(opened, index, inputs, outputs, problem)
    type(model), intent(in) :: opened
    integer, intent(in) :: index
    type(tensor), allocatable, intent(out) :: inputs(:), outputs(:)
    character(:), allocatable, intent(out) :: problem
    type(c_ptr) :: given(opened%input_count), expected(opened%output_count), error
    integer :: i
    if (failed(exportkit_read_case(opened%handle, int(index - 1, c_size_t), given, size(given, kind=c_size_t), &
                                   expected, size(expected, kind=c_size_t), error), error, problem)) return
    inputs = [(tensor(given(i)), i=1, size(given))]
    outputs = [(tensor(expected(i)), i=1, size(expected))]
  end subroutine

  ! Runs a recorded case again, counted from 1, and compares it with the outputs at export.
  subroutine replay(opened, index, problem)
    type(model), intent(in) :: opened
    integer, intent(in) :: index
    character(:), allocatable, intent(out) :: problem
    type(c_ptr) :: error
    if (failed(exportkit_replay(opened%handle, int(index - 1, c_size_t), error), error, problem)) return
  end subroutine

  subroutine close_model(opened)
    type(model), intent(inout) :: opened
    type(c_ptr) :: error
    if (exportkit_close(opened%handle, error) /= 0) call exportkit_error_free(error)
    opened%handle = 0
  end subroutine

  ! The sizes in Fortran's order.
  function sizes_of_tensor(self) result(sizes)
    class(tensor), intent(in) :: self
    integer, allocatable :: sizes(:)
    type(dl_managed_tensor_versioned), pointer :: managed
    integer(c_int64_t), pointer :: reversed(:)
    call c_f_pointer(self%managed, managed)
    call c_f_pointer(managed%contents%shape, reversed, [managed%contents%ndim])
    sizes = int(reversed(size(reversed):1:-1))
  end function

  ! The elements in the tensor's memory, until it is released. A pointer of another rank can be set to them:
  ! image(1:8, 1:32) => made%values()
  function values_of_tensor(self) result(values)
    class(tensor), intent(in) :: self
    real(c_float), pointer :: values(:)
    type(dl_managed_tensor_versioned), pointer :: managed
    call c_f_pointer(self%managed, managed)
    associate (dtype => managed%contents%dtype)
      if (dtype%code /= float_code .or. dtype%bits /= storage_size(values)) error stop "the tensor is not float32"
    end associate
    call c_f_pointer(managed%contents%data, values, [product(self%sizes())])
  end function

  subroutine release(tensors)
    type(tensor), intent(inout) :: tensors(:)
    type(dl_managed_tensor_versioned), pointer :: managed
    procedure(delete_tensor), pointer :: delete
    integer :: i
    do i = 1, size(tensors)
      call c_f_pointer(tensors(i)%managed, managed)
      call c_f_procpointer(managed%deleter, delete)
      call delete(tensors(i)%managed)
      tensors(i)%managed = c_null_ptr
    end do
  end subroutine

  ! Whether a call failed. Frees the error after its message was read.
  logical function failed(code, error, problem)
    integer(c_int), intent(in) :: code
    type(c_ptr), intent(in) :: error
    character(:), allocatable, intent(inout) :: problem
    failed = code /= 0
    if (.not. failed) return
    problem = text(exportkit_error_message(error))
    call exportkit_error_free(error)
  end function

  function text(pointer) result(copied)
    type(c_ptr), intent(in) :: pointer
    character(:), allocatable :: copied
    character(kind=c_char), pointer :: letters(:)
    integer :: i
    call c_f_pointer(pointer, letters, [strlen(pointer)])
    allocate (character(size(letters)) :: copied)
    do i = 1, size(letters)
      copied(i:i) = letters(i)
    end do
  end function
end module
