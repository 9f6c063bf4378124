//! Loads a package, checks it against its recorded cases, and runs the first case on slices of this program:
//! predict model.pt2
//!
//! To build it, with $LIB the folder of libexportkit_runtime.so (docs/c.md):
//! rustc --edition 2021 -O main.rs -o predict -L $LIB -C link-args="-Wl,-rpath,$LIB,--allow-shlib-undefined"

mod exportkit;

use exportkit::{Error, Model, View};

fn run(path: &str) -> Result<(), Error> {
    let model = Model::open(path)?;
    println!("{} on {}", model.name, model.device);
    for input in &model.inputs {
        println!("takes {} {}", input.name, input.dtype);
    }
    for index in 0..model.case_count {
        model.replay(index)?;
        println!("case {index}: ok");
    }
    let (recorded, expected) = model.read_case(0)?;
    let own: Vec<Vec<f32>> =
        recorded.iter().map(|tensor| tensor.elements().expect("this program has float32 only").to_vec()).collect();
    let inputs: Vec<View> = own.iter().zip(&recorded).map(|(values, tensor)| View::new(values, tensor.sizes())).collect();
    for ((got, expected), info) in model.run(&inputs)?.iter().zip(&expected).zip(&model.outputs) {
        println!("got {} {:?}", info.name, got.sizes());
        let pairs = got.elements::<f32>().zip(expected.elements::<f32>()).expect("this program has float32 only");
        assert!(pairs.0.iter().zip(pairs.1).all(|(a, b)| (a - b).abs() <= 1e-4), "it differs from the recorded one");
    }
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() != 2 {
        eprintln!("usage: {} PACKAGE", arguments[0]);
        std::process::exit(2);
    }
    if let Err(error) = run(&arguments[1]) {
        eprintln!("{error}");
        std::process::exit(error.code / 100);
    }
}
