//! Test certificates: a CA, a server for `localhost` and 127.0.0.1, and a client, in the layout of
//! qemu and libnbd. Tests of other crates include this file too.

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use std::{fs, path::Path};

/// Writes certificates into a folder; each call creates its own CA.
pub fn write(dir: &Path) {
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    fs::write(dir.join("ca-cert.pem"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(ca, ca_key);
    for (whose, purpose) in
        [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
    {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        parameters.extended_key_usages = vec![purpose];
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        fs::write(dir.join(format!("{whose}-cert.pem")), certificate.pem()).unwrap();
        fs::write(dir.join(format!("{whose}-key.pem")), key.serialize_pem()).unwrap();
    }
}
