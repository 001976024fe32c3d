//! Certificates: the connections that TLS allows, and the replacement of certificates.

use super::*;

#[test]
fn mutual_tls_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority(), authority());
    let at = directory.path();
    let config = server_config(&files(at, "server", &ours, &ours)).unwrap();
    let server = start(listen::ServerOptions { tls: Some(config), ..Default::default() });
    let client =
        |name, signer, trusted| ClientTls::new(&files(at, name, signer, trusted), None).unwrap();
    round_trip(&connect(&server, Some(client("good", &ours, &ours))).unwrap());
    let refused = |tls| {
        let error = connect(&server, tls).expect_err("it must be refused");
        assert!(
            matches!(error, StoreError::Refused { .. } | StoreError::Unreachable { .. }),
            "{error}"
        );
        error.to_string()
    };
    refused(Some(client("stranger", &theirs, &ours)));
    let error = refused(Some(client("wary", &ours, &theirs)));
    assert!(error.contains("one authority"), "{error}");
    refused(None);
    let mut named = client("x", &ours, &ours);
    named.server_name = Some("other.example".into());
    refused(Some(named));
    let roots = nameless_roots(&ours);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    refused(Some(ClientTls::with_config(Arc::new(config), None)));
    assert_eq!(server.pool().region_count(), 0);
}

/// Returns a root store that trusts this authority, for a client that shows no certificate.
fn nameless_roots(authority: &CertifiedIssuer<'static, KeyPair>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    roots
}

#[test]
fn without_tls_only_loopback_unless_told_so() {
    let everywhere: SocketAddr = (Ipv4Addr::UNSPECIFIED, 0).into();
    let refused = Server::start(everywhere, listen::ServerOptions::default());
    assert!(matches!(refused, Err(StartError::Insecure(_))), "{refused:?}");
    let told = listen::ServerOptions { insecure: true, ..Default::default() };
    Server::start(everywhere, told).unwrap();
}

#[test]
fn clients_use_no_far_server_without_tls_unless_told_so() {
    let far = || ClusterOptions {
        answer_within: Duration::from_millis(1),
        ..ClusterOptions::new(vec!["192.0.2.1".into()])
    };
    let discover = || ClusterOptions { discover: true, ..ClusterOptions::new(Vec::new()) };
    for options in [far(), discover()] {
        let refused = Cluster::connect(options);
        assert!(matches!(refused, Err(StoreError::Insecure { .. })), "{refused:?}");
    }
    let told = Cluster::connect(ClusterOptions { insecure: true, ..far() });
    assert!(!matches!(told, Ok(_) | Err(StoreError::Insecure { .. })), "{told:?}");
}

#[test]
fn certificates_are_read_again_and_no_session_outlives_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = (authority(), authority());
    let ours = files(directory.path(), "server", &old, &old);
    let server = start(listen::ServerOptions {
        tls: Some(server_config(&ours).unwrap()),
        ..Default::default()
    });
    let tls = |files: &Files| ClientTls::new(files, None).unwrap();
    let theirs = files(directory.path(), "client", &old, &old);
    let (client, stays) = (tls(&theirs), tls(&theirs));
    round_trip(&connect(&server, Some(client.clone())).unwrap());
    // The server's certificates change, and it reloads them.
    let ours = files(directory.path(), "server", &new, &new);
    server.set_tls(server_config(&ours).unwrap());
    let refused = connect(&server, Some(stays));
    assert!(matches!(refused, Err(StoreError::Refused { .. })), "{refused:?}");
    // The client's certificates change.
    files(directory.path(), "client", &new, &new);
    round_trip(&connect(&server, Some(client)).unwrap());
}

#[test]
fn the_certificate_that_expires_first_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(directory.path(), "x", &authority(), &authority());
    let (_, never) = files.first_expiry().unwrap();
    assert!(never > std::time::SystemTime::now() + Duration::from_secs(1 << 30));
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.not_after = rcgen::date_time_ymd(2031, 2, 3);
    std::fs::write(&files.authority, params.self_signed(&key).unwrap().pem()).unwrap();
    let (path, expires) = files.first_expiry().unwrap();
    let expires = expires.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!((path, expires.as_secs()), (files.authority.as_path(), 1_927_843_200));
}
