//! The ops of a backend that submits descriptions of ops.

/// The methods of [`Fp8Ops`](crate::Fp8Ops) for a backend whose float and int tensors have a `client` and `into_ir`. `$submit`
/// takes the client and a description, and returns the outputs.
macro_rules! lazy_ops {
    ($submit:expr) => {
        fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
            let client = input.client.clone();
            let desc = custom::amax(input.into_ir(), || client.create_empty_handle());
            let [amax] = $submit(&client, desc);
            amax
        }

        fn fp8_scales(
            amax: FloatTensor<Self>,
            format: Fp8Format,
            power_of_two: bool,
        ) -> FloatTensor<Self> {
            let client = amax.client.clone();
            let desc = custom::scales(amax.into_ir(), format, power_of_two, || {
                client.create_empty_handle()
            });
            let [scales] = $submit(&client, desc);
            scales
        }

        fn fp8_quantize(
            input: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            format: Fp8Format,
        ) -> (IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let desc = custom::quantize(input.into_ir(), scale.into_ir(), format, || {
                client.create_empty_handle()
            });
            let [codes, amax] = $submit(&client, desc);
            (codes, amax)
        }

        fn fp8_quantize_transposed(
            input: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            format: Fp8Format,
        ) -> (IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let desc =
                custom::quantize_transposed(input.into_ir(), scale.into_ir(), format, || {
                    client.create_empty_handle()
                });
            let [codes, transposed, amax] = $submit(&client, desc);
            (codes, transposed, amax)
        }

        fn fp8_dequantize(
            codes: IntTensor<Self>,
            scale: FloatTensor<Self>,
            format: Fp8Format,
            dtype: FloatDType,
        ) -> FloatTensor<Self> {
            let client = codes.client.clone();
            let desc = custom::dequantize(codes.into_ir(), scale.into_ir(), format, dtype, || {
                client.create_empty_handle()
            });
            let [values] = $submit(&client, desc);
            values
        }

        fn fp8_matmul(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            spec: MatmulSpec,
        ) -> FloatTensor<Self> {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = bias.row().map(|bias| bias.into_ir());
            let desc = custom::matmul(sides, scales, bias, spec, false, || {
                client.create_empty_handle()
            });
            let [product] = $submit(&client, desc);
            product
        }

        fn fp8_matmul_amax(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            spec: MatmulSpec,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = bias.row().map(|bias| bias.into_ir());
            let desc = custom::matmul(sides, scales, bias, spec, true, || {
                client.create_empty_handle()
            });
            let [product, amax] = $submit(&client, desc);
            (product, amax)
        }

        fn fp8_update_scale(
            history: FloatTensor<Self>,
            scale: FloatTensor<Self>,
            amax: FloatTensor<Self>,
            update: ScaleUpdate,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let client = history.client.clone();
            let [history, scale, amax] = [history, scale, amax].map(|tensor| tensor.into_ir());
            let desc = custom::update_scale(history, scale, amax, update, || {
                client.create_empty_handle()
            });
            let [history, scale] = $submit(&client, desc);
            (history, scale)
        }

        fn fp8_quantize_blocks(
            input: FloatTensor<Self>,
            cast: Fp8Cast,
        ) -> (IntTensor<Self>, FloatTensor<Self>) {
            let client = input.client.clone();
            let desc =
                custom::quantize_blocks(input.into_ir(), cast, || client.create_empty_handle());
            let [codes, scale] = $submit(&client, desc);
            (codes, scale)
        }

        fn fp8_dequantize_blocks(
            codes: IntTensor<Self>,
            scale: FloatTensor<Self>,
            granularity: Granularity,
            format: Fp8Format,
            dtype: FloatDType,
        ) -> FloatTensor<Self> {
            let client = codes.client.clone();
            let inputs = [codes.into_ir(), scale.into_ir()];
            let desc = custom::dequantize_blocks(inputs, granularity, format, dtype, || {
                client.create_empty_handle()
            });
            let [values] = $submit(&client, desc);
            values
        }

        fn fp8_matmul_blocks(
            lhs: IntTensor<Self>,
            rhs: IntTensor<Self>,
            lhs_scale: FloatTensor<Self>,
            rhs_scale: FloatTensor<Self>,
            bias: Bias<Self>,
            granularities: [Granularity; 2],
            spec: MatmulSpec,
        ) -> FloatTensor<Self> {
            let client = lhs.client.clone();
            let sides = [lhs.into_ir(), rhs.into_ir()];
            let scales = [lhs_scale.into_ir(), rhs_scale.into_ir()];
            let bias = bias.row().map(|bias| bias.into_ir());
            let desc = custom::matmul_blocks(sides, scales, bias, granularities, spec, || {
                client.create_empty_handle()
            });
            let [product] = $submit(&client, desc);
            product
        }
    };
}

pub(crate) use lazy_ops;
