//! The part of exportkit.h that a program with slices needs: opens a package, runs it, frees what it returned.

use std::ffi::{CStr, CString};
use std::mem::size_of;
use std::os::raw::{c_char, c_int, c_void};
use std::{fmt, ptr, slice};

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensorVersioned {
    version: [u32; 2],
    manager_ctx: *mut c_void,
    deleter: extern "C" fn(*mut DlManagedTensorVersioned),
    flags: u64,
    tensor: DlTensor,
}

#[repr(C)]
struct RunOptions {
    size: usize,
    flags: u64,
    stream: *mut c_void,
}

#[repr(C)]
struct TensorInfo {
    name: *const c_char,
    dtype: *const c_char,
    element: DlDataType,
    ndim: i32,
    shape: *const c_void,
}

#[repr(C)]
struct Description {
    name: *const c_char,
    version: *const c_char,
    target: *const c_char,
    device: *const c_char,
    dl_device: DlDevice,
    input_count: usize,
    inputs: *const *const TensorInfo,
    output_count: usize,
    outputs: *const *const TensorInfo,
    dimension_count: usize,
    dimensions: *const c_void,
    case_count: usize,
    cases: *const c_void,
}

type RawError = *mut c_void;
type RawOutput = *mut DlManagedTensorVersioned;

#[link(name = "exportkit_runtime")]
extern "C" {
    fn exportkit_open(path: *const c_char, options: *const c_void, model: *mut u64, error: *mut RawError) -> c_int;
    fn exportkit_close(model: u64, error: *mut RawError) -> c_int;
    fn exportkit_describe(model: u64, description: *mut *const Description, error: *mut RawError) -> c_int;
    fn exportkit_run(
        model: u64, inputs: *const *const DlTensor, input_count: usize, outputs: *mut RawOutput, output_count: usize,
        options: *const RunOptions, error: *mut RawError,
    ) -> c_int;
    fn exportkit_read_case(
        model: u64, index: usize, inputs: *mut RawOutput, input_count: usize, outputs: *mut RawOutput,
        output_count: usize, error: *mut RawError,
    ) -> c_int;
    fn exportkit_replay(model: u64, index: usize, error: *mut RawError) -> c_int;
    fn exportkit_error_name(error: RawError) -> *const c_char;
    fn exportkit_error_message(error: RawError) -> *const c_char;
    fn exportkit_error_hint(error: RawError) -> *const c_char;
    fn exportkit_error_free(error: RawError);
}

const CPU: DlDevice = DlDevice { device_type: 1, device_id: 0 };
const CONTIGUOUS_OUTPUTS: u64 = 2;

/// Why a call failed.
#[derive(Debug)]
pub struct Error {
    /// One of the constants of exportkit.h; `code / 100` is an exit code.
    pub code: i32,
    /// Such as "InputError".
    pub name: String,
    pub message: String,
    pub hint: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.message)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "\n  {}", self.hint) }
    }
}

impl std::error::Error for Error {}

/// An element type of tensors.
///
/// # Safety
/// `DTYPE` must describe the type, and every pattern of bits must be a value of it.
pub unsafe trait Element {
    const DTYPE: DlDataType;
}

macro_rules! elements {
    ($($type:ty = $code:literal),*) => {$(
        unsafe impl Element for $type {
            const DTYPE: DlDataType = DlDataType { code: $code, bits: 8 * size_of::<$type>() as u8, lanes: 1 };
        }
    )*};
}
elements!(i8 = 0, i16 = 0, i32 = 0, i64 = 0, u8 = 1, u16 = 1, u32 = 1, u64 = 1, f32 = 2, f64 = 2);

/// An input: a slice of the program, or a tensor that the library made.
pub struct View<'a> {
    tensor: DlTensor,
    _sizes: Vec<i64>, // the tensor points to it
    _elements: std::marker::PhantomData<&'a ()>,
}

impl<'a> View<'a> {
    /// A row-major tensor of these sizes in the slice's memory. Panics if the slice has another number of elements.
    pub fn new<T: Element>(elements: &'a [T], sizes: &[i64]) -> Self {
        assert_eq!(sizes.iter().product::<i64>(), elements.len() as i64, "the sizes are not those of the slice");
        let mut sizes = sizes.to_vec();
        let tensor = DlTensor {
            data: elements.as_ptr() as *mut c_void,
            device: CPU,
            ndim: sizes.len() as i32,
            dtype: T::DTYPE,
            shape: sizes.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        View { tensor, _sizes: sizes, _elements: std::marker::PhantomData }
    }
}

/// A tensor that the library made, row-major and on the CPU. Dropping it frees it.
pub struct Tensor(RawOutput);

unsafe impl Send for Tensor {}
unsafe impl Sync for Tensor {}

impl Tensor {
    fn tensor(&self) -> &DlTensor {
        unsafe { &(*self.0).tensor }
    }

    pub fn sizes(&self) -> &[i64] {
        unsafe { slice::from_raw_parts(self.tensor().shape, self.tensor().ndim as usize) }
    }

    /// The elements, in the tensor's memory; none if it has another dtype or is not on the CPU.
    pub fn elements<T: Element>(&self) -> Option<&[T]> {
        let tensor = self.tensor();
        if tensor.dtype != T::DTYPE || tensor.device.device_type != CPU.device_type {
            return None;
        }
        let count = self.sizes().iter().product::<i64>() as usize;
        let data = if count == 0 { ptr::NonNull::dangling().as_ptr() } else { tensor.data as *const T };
        Some(unsafe { slice::from_raw_parts(data, count) })
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        unsafe { ((*self.0).deleter)(self.0) }
    }
}

/// An input or output, such as "image" and "float32".
pub struct Info {
    pub name: String,
    pub dtype: String,
}

/// An open package. Any number of threads may use it; dropping it closes it.
pub struct Model {
    handle: u64,
    pub name: String,
    pub device: String,
    pub inputs: Vec<Info>,
    pub outputs: Vec<Info>,
    pub case_count: usize,
}

impl Model {
    pub fn open(path: &str) -> Result<Model, Error> {
        let path = CString::new(path).expect("a path has no NUL");
        let mut model = Model {
            handle: 0, name: String::new(), device: String::new(), inputs: vec![], outputs: vec![], case_count: 0,
        };
        check(|error| unsafe { exportkit_open(path.as_ptr(), ptr::null(), &mut model.handle, error) })?;
        let mut description = ptr::null();
        check(|error| unsafe { exportkit_describe(model.handle, &mut description, error) })?;
        let about = unsafe { &*description };
        model.name = text(about.name);
        model.device = text(about.device);
        model.inputs = infos(about.inputs, about.input_count);
        model.outputs = infos(about.outputs, about.output_count);
        model.case_count = about.case_count;
        Ok(model)
    }

    /// Runs the model.
    pub fn run(&self, inputs: &[View]) -> Result<Vec<Tensor>, Error> {
        let views: Vec<*const DlTensor> = inputs.iter().map(|input| &input.tensor as *const DlTensor).collect();
        let mut made = vec![ptr::null_mut(); self.outputs.len()];
        let options = RunOptions { size: size_of::<RunOptions>(), flags: CONTIGUOUS_OUTPUTS, stream: ptr::null_mut() };
        check(|error| unsafe {
            exportkit_run(self.handle, views.as_ptr(), views.len(), made.as_mut_ptr(), made.len(), &options, error)
        })?;
        Ok(made.into_iter().map(Tensor).collect())
    }

    /// Reads a recorded case: the inputs, and the outputs at export.
    pub fn read_case(&self, index: usize) -> Result<(Vec<Tensor>, Vec<Tensor>), Error> {
        let mut given = vec![ptr::null_mut(); self.inputs.len()];
        let mut expected = vec![ptr::null_mut(); self.outputs.len()];
        check(|error| unsafe {
            exportkit_read_case(
                self.handle, index, given.as_mut_ptr(), given.len(), expected.as_mut_ptr(), expected.len(), error,
            )
        })?;
        Ok((given.into_iter().map(Tensor).collect(), expected.into_iter().map(Tensor).collect()))
    }

    /// Runs a recorded case again and compares it with the outputs at export.
    pub fn replay(&self, index: usize) -> Result<(), Error> {
        check(|error| unsafe { exportkit_replay(self.handle, index, error) })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        if self.handle != 0 {
            unsafe { exportkit_close(self.handle, ptr::null_mut()) };
        }
    }
}

fn check(call: impl FnOnce(*mut RawError) -> c_int) -> Result<(), Error> {
    let mut raw = ptr::null_mut();
    let code = call(&mut raw);
    if code == 0 {
        return Ok(());
    }
    let [name, message, hint] = unsafe {
        [exportkit_error_name(raw), exportkit_error_message(raw), exportkit_error_hint(raw)].map(text)
    };
    unsafe { exportkit_error_free(raw) };
    Err(Error { code, name, message, hint })
}

fn infos(infos: *const *const TensorInfo, count: usize) -> Vec<Info> {
    let found = (0..count).map(|i| unsafe { &**infos.add(i) });
    found.map(|info| Info { name: text(info.name), dtype: text(info.dtype) }).collect()
}

fn text(pointer: *const c_char) -> String {
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
