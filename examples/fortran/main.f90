! Loads a package, checks it against its recorded cases, and runs the first case on arrays of this program:
! predict model.pt2
!
! To build it, with $LIB the folder of libexportkit_runtime.so (docs/c.md):
! gfortran exportkit.f90 main.f90 -o predict -L$LIB -lexportkit_runtime -Wl,-rpath,$LIB,--allow-shlib-undefined
program predict
  use, intrinsic :: iso_c_binding, only: c_float
  use exportkit
  implicit none

  ! An array of the program's own.
  type :: own_array
    real(c_float), allocatable :: values(:)
  end type

  type(model) :: net
  type(tensor), allocatable :: recorded(:), expected(:), got(:)
  type(own_array), allocatable, target :: arrays(:)
  type(view), allocatable :: inputs(:)
  real(c_float), pointer :: values(:), wanted(:)
  character(:), allocatable :: problem
  character(4096) :: path
  integer :: i

  if (command_argument_count() /= 1) error stop "usage: predict PACKAGE"
  call get_command_argument(1, path)
  call open_model(trim(path), net, problem)
  call check(problem)
  print "(a)", net%name // " on " // net%device
  do i = 1, net%input_count
    print "(a)", "takes " // input_name(net, i)
  end do
  do i = 1, net%case_count
    call replay(net, i, problem)
    call check(problem)
    print "(a, i0, a)", "case ", i, ": ok"
  end do

  call read_case(net, 1, recorded, expected, problem)
  call check(problem)
  allocate (arrays(size(recorded)), inputs(size(recorded)))
  do i = 1, size(recorded)
    values => recorded(i)%values()
    arrays(i)%values = values
    inputs(i) = view_of(arrays(i)%values, recorded(i)%sizes())  ! of a(:, :): view_of(a, shape(a))
  end do
  call run(net, inputs, got, problem)
  call check(problem)
  do i = 1, size(got)
    print "(a, *(1x, i0))", "got", got(i)%sizes()
    values => got(i)%values()
    wanted => expected(i)%values()
    if (maxval(abs(values - wanted)) > 1e-4) error stop "an output differs from the recorded one"
  end do
  call release(recorded)
  call release(expected)
  call release(got)
  call close_model(net)

contains

  subroutine check(problem)
    character(:), allocatable, intent(in) :: problem
    if (allocated(problem)) error stop problem
  end subroutine
end program
