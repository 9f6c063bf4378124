// Calls operators of a library without torch: what the library needs of torch's C interface is here, for contiguous
// tensors on the CPU. A call is a line of standard input with tabs between its words; test_emulated_operators.py writes
// it, and says what the words are. The answer is a line for each output, then an empty line.
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

namespace {

// The numbers are torch's, c10/core/ScalarType.h.
constexpr int32_t kByte = 0, kChar = 1, kShort = 2, kInt = 3, kLong = 4, kHalf = 5, kFloat = 6, kDouble = 7, kBool = 11,
                  kBFloat16 = 15;

size_t element_size(int32_t dtype) {
  switch (dtype) {
    case kByte:
    case kChar:
    case kBool:
      return 1;
    case kShort:
    case kHalf:
    case kBFloat16:
      return 2;
    case kInt:
    case kFloat:
      return 4;
    default:
      return 8;
  }
}

struct Tensor {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<char> bytes;

  int64_t numel() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }
};

using Handle = std::shared_ptr<Tensor>;

Tensor& of(AtenTensorHandle handle) { return **reinterpret_cast<Handle*>(handle); }

AtenTensorHandle owned(const Handle& tensor) { return reinterpret_cast<AtenTensorHandle>(new Handle(tensor)); }

Handle allocate(int32_t dtype, std::vector<int64_t> sizes) {
  auto tensor = std::make_shared<Tensor>();
  tensor->dtype = dtype;
  tensor->sizes = std::move(sizes);
  tensor->strides.resize(tensor->sizes.size());
  int64_t stride = 1;
  for (size_t dim = tensor->sizes.size(); dim-- > 0; stride *= std::max<int64_t>(tensor->sizes[dim], 1))
    tensor->strides[dim] = stride;
  // What an operator does not write is seen.
  tensor->bytes.assign(static_cast<size_t>(tensor->numel()) * element_size(dtype), '\x7b');
  return tensor;
}

using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

// A negative dimension counts from the last.
int64_t item_at(const std::vector<int64_t>& of, int64_t dim) {
  return of.at(static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(of.size()) : dim));
}

StableIValue bits(double value) {
  StableIValue found = 0;
  std::memcpy(&found, &value, sizeof value);
  return found;
}

}  // namespace

struct StableListOpaque {
  std::vector<StableIValue> items;
};

extern "C" {

#define DTYPE(function, number) \
  int32_t function() { return number; }
DTYPE(aoti_torch_dtype_uint8, kByte)
DTYPE(aoti_torch_dtype_int8, kChar)
DTYPE(aoti_torch_dtype_int16, kShort)
DTYPE(aoti_torch_dtype_int32, kInt)
DTYPE(aoti_torch_dtype_int64, kLong)
DTYPE(aoti_torch_dtype_float16, kHalf)
DTYPE(aoti_torch_dtype_float32, kFloat)
DTYPE(aoti_torch_dtype_float64, kDouble)
DTYPE(aoti_torch_dtype_complex32, 8)
DTYPE(aoti_torch_dtype_complex64, 9)
DTYPE(aoti_torch_dtype_complex128, 10)
DTYPE(aoti_torch_dtype_bool, kBool)
DTYPE(aoti_torch_dtype_bfloat16, kBFloat16)
DTYPE(aoti_torch_dtype_float8_e5m2, 23)
DTYPE(aoti_torch_dtype_float8_e4m3fn, 24)
DTYPE(aoti_torch_dtype_float8_e5m2fnuz, 25)
DTYPE(aoti_torch_dtype_float8_e4m3fnuz, 26)
DTYPE(aoti_torch_dtype_uint16, 27)
DTYPE(aoti_torch_dtype_uint32, 28)
DTYPE(aoti_torch_dtype_uint64, 29)
DTYPE(torch_dtype_float8_e8m0fnu, 44)
DTYPE(torch_dtype_float4_e2m1fn_x2, 45)
DTYPE(aoti_torch_device_type_cpu, 0)
DTYPE(aoti_torch_device_type_cuda, 1)
DTYPE(aoti_torch_device_type_xpu, 12)
DTYPE(aoti_torch_device_type_mps, 13)
DTYPE(aoti_torch_device_type_meta, 14)
DTYPE(aoti_torch_device_type_privateuse1, 20)
DTYPE(aoti_torch_memory_format_contiguous_format, 0)
#undef DTYPE

uint64_t aoti_torch_abi_version() { return uint64_t{0x020b} << 48; }
size_t aoti_torch_dtype_element_size(int32_t dtype) { return element_size(dtype); }

AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*) { return 0; }
AOTITorchError aoti_torch_library_init_fragment(const char*, const char*, uint32_t, TorchLibraryHandle*) { return 0; }
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle*) {
  return 0;
}
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, Kernel kernel, uint64_t) {
  kernels()[name] = kernel;
  return 0;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  delete reinterpret_cast<Handle*>(handle);
  return 0;
}
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle handle, AtenTensorHandle* made) {
  *made = owned(*reinterpret_cast<Handle*>(handle));
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t*, int32_t dtype, int32_t,
                                        int32_t, AtenTensorHandle* made) {
  *made = owned(allocate(dtype, {sizes, sizes + dims}));
  return 0;
}
#define GETTER(function, type, value)                              \
  AOTITorchError function(AtenTensorHandle tensor, type* answer) { \
    *answer = value;                                               \
    return 0;                                                      \
  }
GETTER(aoti_torch_get_device_index, int32_t, (static_cast<void>(tensor), -1))
GETTER(aoti_torch_get_device_type, int32_t, (static_cast<void>(tensor), 0))
GETTER(aoti_torch_is_contiguous, bool, (static_cast<void>(tensor), true))
GETTER(aoti_torch_get_dim, int64_t, static_cast<int64_t>(of(tensor).sizes.size()))
GETTER(aoti_torch_get_dtype, int32_t, of(tensor).dtype)
GETTER(aoti_torch_get_numel, int64_t, of(tensor).numel())
GETTER(aoti_torch_get_sizes, int64_t*, of(tensor).sizes.data())
GETTER(torch_get_mutable_data_ptr, void*, of(tensor).bytes.data())
GETTER(torch_get_const_data_ptr, const void*, of(tensor).bytes.data())
#undef GETTER
AOTITorchError aoti_torch_get_size(AtenTensorHandle tensor, int64_t dim, int64_t* size) {
  *size = item_at(of(tensor).sizes, dim);
  return 0;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle tensor, int64_t dim, int64_t* stride) {
  *stride = item_at(of(tensor).strides, dim);
  return 0;
}

AOTITorchError torch_delete_list(StableListHandle list) {
  delete list;
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = list->items.size();
  return 0;
}
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = list->items.at(index);
  return 0;
}

AOTITorchError torch_get_num_threads(uint32_t* threads) {
  *threads = 1;
  return 0;
}
// In pieces, so that what a kernel does at the ends of one is seen.
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelFunc work, void* context) {
  const int64_t step = std::max(grain, (end - begin + 1) / 2);
  for (; begin < end; begin += step) work(begin, std::min(begin + step, end), context);
  return 0;
}
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (std::string(name) != "aten::zero_") {
    std::cerr << "an operator of torch that is not here: " << name << "\n";
    return 1;
  }
  std::vector<char>& bytes = of(reinterpret_cast<AtenTensorHandle>(stack[0])).bytes;
  std::fill(bytes.begin(), bytes.end(), '\0');
  return 0;
}
}

namespace {

struct Given {
  std::vector<std::pair<Handle, std::string>> tensors;  // and their files

  StableIValue value(const std::string& word) {
    std::istringstream text(word.substr(2));
    switch (word.at(0)) {
      case 't': {
        int32_t dtype = 0;
        size_t dims = 0;
        text >> dtype >> dims;
        std::vector<int64_t> sizes(dims);
        for (int64_t& size : sizes) text >> size;
        std::string path;
        text >> path;
        const Handle tensor = allocate(dtype, sizes);
        std::ifstream(path, std::ios::binary)
            .read(tensor->bytes.data(), static_cast<std::streamsize>(tensor->bytes.size()));
        tensors.emplace_back(tensor, path);
        return reinterpret_cast<StableIValue>(owned(tensor));
      }
      case 'd':
        return bits(std::stod(word.substr(2)));
      case 'l': {
        auto* list = new StableListOpaque;
        for (double item = 0; text >> item;) list->items.push_back(bits(item));
        return reinterpret_cast<StableIValue>(list);
      }
      case 'o':
        return word == "o:" ? 0 : reinterpret_cast<StableIValue>(new StableIValue(value(word.substr(2))));
      default:
        return static_cast<StableIValue>(std::stoll(word.substr(2)));
    }
  }
};

void write(const Tensor& tensor, const std::string& path) {
  std::ofstream(path, std::ios::binary).write(tensor.bytes.data(), static_cast<std::streamsize>(tensor.bytes.size()));
}

// name, number of outputs, prefix of their files, arguments
void call(const std::vector<std::string>& words) {
  const size_t outputs = std::stoul(words.at(1));
  Given given;
  std::vector<StableIValue> stack;
  for (size_t i = 3; i < words.size(); ++i) stack.push_back(given.value(words[i]));
  const size_t arguments = stack.size();
  stack.resize(std::max(arguments, outputs) + 1);
  kernels().at(words.at(0))(stack.data(), arguments, outputs);
  for (const auto& [tensor, path] : given.tensors) write(*tensor, path);  // an operator may write to it
  for (size_t i = 0; i < outputs; ++i) {
    const auto handle = reinterpret_cast<AtenTensorHandle>(stack[i]);
    write(of(handle), words.at(2) + std::to_string(i));
    std::cout << of(handle).dtype;
    for (const int64_t size : of(handle).sizes) std::cout << " " << size;
    std::cout << "\n";
    aoti_torch_delete_tensor_object(handle);
  }
  std::cout << std::endl;
}

}  // namespace

int main(int, char** argv) {
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream text(line);
    std::vector<std::string> words;
    for (std::string word; std::getline(text, word, '\t');) words.push_back(word);
    call(words);
  }
}
