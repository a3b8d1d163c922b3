//! Serves an autocast device over Flex to other processes, and prints its address.

use burn::tensor::Device;
use burn_amp::{Autocast, Policy};
use burn_flex::{Flex, FlexDevice};
use burn_layer::{Layered, LayeredDevice};
use burn_remote::server::{BackendServer, WebSocketTransport};
use std::net::{Ipv4Addr, TcpListener};

fn main() {
    let policy = match std::env::args().nth(1).as_deref() {
        Some("O0") => Policy::o0(),
        Some("bf16") => Policy::bf16(),
        Some("fp16") => Policy::fp16(),
        policy => panic!("{policy:?} is none of O0, bf16 and fp16"),
    };
    let layer = Autocast::new(policy).layer(&Device::flex()).unwrap();
    let device = LayeredDevice::new(FlexDevice, [Box::new(layer) as _]);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("ws://{}", listener.local_addr().unwrap());
    BackendServer::<Layered<Flex>>::new([device])
        .serve(WebSocketTransport::from_listener(listener))
        .unwrap();
}
